"""How things lie on disk: whole files, and tensors that show damage."""
