"""`make up`: the whole stack on one machine, for a first answer, for development and for the tests."""
