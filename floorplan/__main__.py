"""python -m floorplan"""

from floorplan.cli import main

main()
