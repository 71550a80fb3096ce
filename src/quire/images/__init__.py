"""Images in prompts: files read, cut into what towers take, and written into prompts as rows of ids."""
