"""What a compiled function checks when it runs, and what TVM could not compile -> an error."""
