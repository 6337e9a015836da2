"""Convert a GGUF file to a model folder in bfloat16: python -m octavo.cli.convert_gguf FILE FOLDER.

The one module of the command line that imports torch and transformers; it runs as a process of its own.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main() -> None:
    """Convert sys.argv[1] to the folder sys.argv[2]."""
    gguf, target = Path(sys.argv[1]), Path(sys.argv[2])
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
        local_files_only=True,
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True).save_pretrained(target)


if __name__ == "__main__":
    main()
