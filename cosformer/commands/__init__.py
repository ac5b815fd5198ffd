"""The verbs that train models and use them."""
