"""tmp"""
def conflict(shared, uploads): return {}
