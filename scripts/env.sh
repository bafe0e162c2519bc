# Sourced by the other scripts: leaves the repository root in $ROOT and the environment's programs on the path.
#
# An active virtual environment or conda environment is used as it is found, after installing what it lacks; otherwise
# .venv is made. Installing is skipped while the stamp is newer than pyproject.toml and constraints.txt.

ROOT="$(CDPATH='' cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.." && pwd)"
PYTHON="${PYTHON:-python3}"

# ensure_env EXTRAS: an environment with the package and the given extras ("" or "test").
ensure_env() {
  local extras="$1" prefix
  if [ -n "${VIRTUAL_ENV:-${CONDA_PREFIX:-}}" ]; then
    prefix="${VIRTUAL_ENV:-$CONDA_PREFIX}"
  else
    prefix="$ROOT/.venv"
    if ! "$prefix/bin/python" -m pip --version >/dev/null 2>&1; then # not there, or only half made
      "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "Python 3.11 or newer is needed; $PYTHON is $("$PYTHON" --version 2>&1). Set PYTHON to a newer one." >&2
        return 1
      }
      echo "Making $prefix" >&2
      "$PYTHON" -m venv --clear "$prefix" || {
        echo "Making a virtual environment failed (on Debian it needs the package python3-venv)" >&2
        return 1
      }
    fi
  fi
  export PATH="$prefix/bin:$PATH"
  local stamp="$prefix/.torchtitan-mixle${extras:+-$extras}"
  # What was installed with an extra serves without it too.
  fresh "$stamp" || { [ -z "$extras" ] && fresh "$prefix/.torchtitan-mixle-test"; } && return 0
  echo "Installing torchtitan_mixle${extras:+ with the extra \"$extras\"} into $prefix (a few minutes the first time)" >&2
  python -m pip install --quiet -c "$ROOT/constraints.txt" -e "$ROOT${extras:+[$extras]}" || return 1
  echo "$ROOT" >"$stamp"
}

# fresh STAMP: this checkout was installed after its requirements last changed.
fresh() {
  [ -e "$1" ] && [ "$(cat "$1")" = "$ROOT" ] && [ ! "$ROOT/pyproject.toml" -nt "$1" ] &&
    [ ! "$ROOT/constraints.txt" -nt "$1" ]
}
