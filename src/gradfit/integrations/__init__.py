"""gradfit inside other libraries' trainers; each module needs its library, and nothing else here
does.
"""
