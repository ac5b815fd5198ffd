"""`cosformer data`: which data sets there are, fetching, generating and checking them."""

from cosformer.data import make
from cosformer.data.known import SETS, require_files
