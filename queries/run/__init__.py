"""Views that look across ranks at the results of rank views."""
