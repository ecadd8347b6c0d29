"""Runtime diagnostics for an SGLang server. Importing this package has no side effect."""

__version__ = "0.1.0"
