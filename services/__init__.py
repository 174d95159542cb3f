"""The services: gateway, prefill, decode, and the command line that starts them. They meet in
proto/ alone."""
