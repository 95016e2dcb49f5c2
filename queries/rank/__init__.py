"""Views that one rank's rows answer."""
