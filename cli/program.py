"""How octavo starts processes of its own, and what these are not to have."""

import sys

OCTAVO = (sys.executable, "-P", "-m", "octavo.cli.main")
"""-P: what lies in the current folder must not shadow modules."""

API_KEY_VARIABLE, ADMIN_API_KEY_VARIABLE = "OCTAVO_API_KEY", "OCTAVO_ADMIN_API_KEY"
SECRET_VARIABLES = frozenset({API_KEY_VARIABLE, ADMIN_API_KEY_VARIABLE})
"""What no process but a frontend is to have in its environment."""
