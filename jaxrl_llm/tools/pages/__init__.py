"""Parts of the generated pages of the reference: macros, commands."""
