# Options behind -o, and mounts.
_tensorfs_options() {
    case $words[1] in
@OPTIONS@
    esac
}

_tensorfs_mounts() {
    local device target type rest
    local -a mounts
    while read -r device target type rest; do
        [[ $type == fuse.tensorfs ]] && mounts+=("$(printf '%b' "$target")")
    done < /proc/mounts
    compadd -a mounts
}

_tensorfs_mounts_or_files() {
    _tensorfs_mounts
    _files
}
