"""A launch of SGLang, read without running it: its flags, its files, and what shells and wrappers around it set."""
