"""The ways to compute what `attend` is asked for, one file each; `attn_variants.attend` registers and chooses them."""
