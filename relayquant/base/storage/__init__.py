"""What is kept in files: archives, modules, parameters, written whole or not at all."""
