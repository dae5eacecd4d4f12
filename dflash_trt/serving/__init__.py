"""An OpenAI-compatible server over an engine directory."""
