"""Files of archives, modules and parameters. Each file is written completely or not at all."""
