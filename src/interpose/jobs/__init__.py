"""Long work in shards: a plan, a commit that counts once, and who runs it: this process, or a Ray cluster."""
