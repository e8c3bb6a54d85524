"""After a first result: what is put back, searched for, edited and measured again."""
