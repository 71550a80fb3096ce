"""What a model writes as messages: content, reasoning and tool calls, found in its text as that comes."""
