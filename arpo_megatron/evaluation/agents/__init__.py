"""Who answers: a checkpoint in an engine of our own, a server that speaks OpenAI's format, or a known answer."""
