"""Other people's systems as rule sets, to validate against and to compare with."""
