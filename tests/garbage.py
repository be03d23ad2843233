"""Makes the search for garbage rare, in the process that imports this: a traced program makes millions of objects that stay, and with
Python's own thresholds the search took a fifth of the suite's time.
"""

import gc

gc.freeze()  # what has been imported stays, and pages shared with forked processes stay shared
gc.set_threshold(50_000, 20, 100)
