"""``python -m mbaas`` runs the command ``mbaas``."""

from mbaas.cli import app

if __name__ == "__main__":
    app(prog_name="mbaas")
