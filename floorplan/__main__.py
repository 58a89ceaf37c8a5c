"""python -m floorplan"""

from floorplan.cli.main import main

main()
