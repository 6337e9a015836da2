"""The command line: roles, supervisor, clients, models."""
