import sys
from pathlib import Path

# the strategies and the interpreter are shared by the files of this folder
sys.path.insert(0, str(Path(__file__).parents[2]))
