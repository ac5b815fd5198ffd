"""What several mechanisms make of q and k before attention."""
