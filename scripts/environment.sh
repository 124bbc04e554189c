# shellcheck shell=bash
# Sourced by the scripts beside it: prepare_environment makes .venv hold what pyproject.toml and constraints.txt say.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="$root/.venv/bin/python"

_fingerprint() {
    # The path is part of it: a virtual environment that was moved or copied does not work in its new place.
    { echo "$root"; cat "$root/pyproject.toml" "$root/constraints.txt"; } | cksum
}

_install() {
    local base="${PYTHON:-python3}"
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "$base is $("$base" --version 2>&1); Python 3.11 or later is needed. Set PYTHON to one." >&2
        return 1
    }
    # Inputs that changed are installed over what is there. Without a stamp the last install did not finish, and nobody
    # knows what it left: start anew.
    [ -f "$root/.venv/installed" ] || rm -rf "$root/.venv"
    rm -f "$root/.venv/installed"
    echo "Installing into $root/.venv (once; a minute or so)" >&2
    "$base" -m venv "$root/.venv" &&
        "$python" -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt" -e "$root[bitsandbytes,cli,docs,models,sweeps,test]" &&
        _fingerprint > "$root/.venv/installed"
}

prepare_environment() {
    # Two scripts started at once: the second waits for the first where the system has flock.
    exec 9> "$root/.venv.lock"
    if command -v flock > /dev/null; then flock 9; fi
    if [ "$(cat "$root/.venv/installed" 2> /dev/null)" != "$(_fingerprint)" ]; then
        _install 9>&-
    fi
    exec 9>&-
}
