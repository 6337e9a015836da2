"""The frontend: clients' text on one side, the scheduler's integers on the other."""
