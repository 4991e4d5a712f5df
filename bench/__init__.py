"""The command `attn-bench`: what every attention variant keeps, whether it is right, and how fast it decodes."""
