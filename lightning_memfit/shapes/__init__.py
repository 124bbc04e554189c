"""The config that ``memfit plan model=llama_70b`` is composed from where the current folder has no such model."""
