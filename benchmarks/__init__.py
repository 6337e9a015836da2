"""Programs that measure; each writes JSON lines {"metric", "value", "unit", ...}. None of them is a test."""
