"""The HTTP door: listener, routes, OpenAI's bodies and answers, streams of events, the web page."""
