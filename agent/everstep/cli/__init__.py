"""The command line: one small file per verb; it parses, calls and prints."""
