"""One client's classifier: made, exported, asked, and given to those who join late."""
