"""Short chat templates in the dialects that models with tools have."""

HERMES = """{%- if tools %}<|start|>system
{%- for tool in tools %}
{{ tool | tojson }}{% endfor %}
Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call><|end|>
{% endif %}
{%- for message in messages %}
<|start|>{{ message.role }}
{{ message.content }}
{%- for tool_call in message.tool_calls or [] %}
{%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
<tool_call>
{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}
</tool_call>
{%- endfor %}<|end|>
{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant
{% endif %}"""

THINKING = (
    HERMES.replace("{{ message.content }}", "{{ message.content.split('</think>')[-1] }}").removesuffix("{% endif %}")
    + "{%- if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)

OPENED = THINKING.replace(
    "{%- if enable_thinking", "{%- if enable_thinking is not defined %}<think>\n{% elif enable_thinking"
)

LLAMA = """{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if tools is not none %}
Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.
{%- for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception("only single tool-calls") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- "}" }}
        {%- for name, value in call.arguments | items %}{{- name + '=' + value | string }}{%- endfor %}
    {%- elif message.role == "tool" %}
        {{- "ipython:" + message.content }}
    {%- else %}
        {{- message.role + ":" + message.content | trim }}
    {%- endif %}
{%- endfor %}"""

MISTRAL = """{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- for message in messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and loop.last %}[AVAILABLE_TOOLS] [
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val | tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}{{- "}}" }}
            {%- endfor %}[/AVAILABLE_TOOLS]
        {%- endif %}
        {{- "[INST] " + message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {{- (tool_call.function | tojson)[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id | length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
        {%- endfor %}{{- "]" }}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id + '"}' }}
    {%- else %}
        {{- " " + message["content"] }}
    {%- endif %}
{%- endfor %}"""

PYTHONIC = (
    "{% if tools %}Answer as [func_name1(params_name1=params_value1)]: {{ tools | tojson }}{% endif %}"
    "{% for message in messages %}{{ message.role }}:{{ message.content }}\n{% endfor %}"
)

TOOL_TEMPLATES = {"hermes": HERMES, "llama3_json": LLAMA, "mistral": MISTRAL, "pythonic": PYTHONIC}
