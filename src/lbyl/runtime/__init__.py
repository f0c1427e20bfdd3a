"""What torch lacks: running, intercepting, files, registries. Knows nothing of channels."""
