"""Steps that run one operator or a chain of them: on a kernel, or in numpy; `plan` chooses."""
