"""Whole answers, chats and many prompts at once, for programs."""
