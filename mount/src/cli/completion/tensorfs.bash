# Options behind -o, and mounts. `@` marks an option whose value is a path.
_tensorfs_list() {
    case $1 in
@OPTIONS@
    esac
}

_tensorfs_mounts() {
    local target type rest
    while read -r _ target type rest; do
        [[ $type == fuse.tensorfs ]] && printf '%b\n' "$target"
    done < /proc/mounts
}

_tensorfs_with_mounts() {
    local line=${COMP_LINE:0:COMP_POINT} cur=$2 word before=() command="" option text key file seen=" " skip
    [[ ${BASH_VERSINFO[0]} -ge 4 ]] || cur=${COMP_WORDS[COMP_CWORD]}
    word=${line##*[[:space:]]}
    read -ra before <<< "${line%"$word"}"
    for text in "${before[@]:1}"; do
        [[ $text == -* ]] || { command=$text; break; }
    done
    # readline replaces what stands behind the last `=` or `:` only.
    skip=$((${#word} - ${#cur}))
    COMPREPLY=()
    if [[ -n $command && ( ${before[*]: -1} == -o || $word == -o?* ) && -n $(_tensorfs_list "$command") ]]; then
        option=${word##*,}
        [[ $word == -o* && $word != *,* ]] && option=${word#-o}
        compopt +o default +o bashdefault 2> /dev/null
        for text in $(_tensorfs_list "$command"); do
            key=${text%%=*}
            [[ $text == *=* ]] && key+="="
            if [[ $option == *=* ]]; then
                if [[ $text == *@ && $option == "${text%@}"* ]]; then
                    compopt -o filenames 2> /dev/null
                    while read -r file; do
                        COMPREPLY+=("${file}")
                    done < <(compgen -f -- "${option#"${text%@}"}")
                    continue
                fi
                key=${text%@}
            elif [[ $seen == *" $key "* ]]; then
                continue
            fi
            seen+="$key "
            if [[ $key == "$option"* && $key != "$option" ]]; then
                text="${word%"$option"}$key"
                COMPREPLY+=("${text:skip}")
                [[ $key == *[=:] ]] && compopt -o nospace 2> /dev/null
            fi
        done
        return 0
    fi
    case $command in
        @MOUNTS@)
            if [[ $word != -* && ${before[*]: -1} != @VALUES@ ]]; then
                while IFS= read -r text; do
                    [[ $text == "$word"* ]] || continue
                    printf -v text %q "$text"
                    COMPREPLY+=("${text:skip}")
                done < <(_tensorfs_mounts)
                [[ $command == warm ]] || compopt +o default +o bashdefault 2> /dev/null
                return 0
            fi
            ;;
    esac
    _tensorfs "$@"
}

if [[ "${BASH_VERSINFO[0]}" -eq 4 && "${BASH_VERSINFO[1]}" -ge 4 || "${BASH_VERSINFO[0]}" -gt 4 ]]; then
    complete -F _tensorfs_with_mounts -o nosort -o bashdefault -o default tensorfs
else
    complete -F _tensorfs_with_mounts -o bashdefault -o default tensorfs
fi
