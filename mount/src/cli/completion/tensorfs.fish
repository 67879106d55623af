# Options behind -o, and mounts.
function __tensorfs_options
    set -l command
    for word in (commandline -opc)[2..]
        if not string match -q -- '-*' $word
            set command $word
            break
        end
    end
    switch "$command"
@OPTIONS@
    end
end

function __tensorfs_mounts
    while read -l line
        set -l fields (string split ' ' -- $line)
        test "$fields[3]" = fuse.tensorfs; and printf '%b\n' $fields[2]
    end </proc/mounts
end

complete -c tensorfs -n '__fish_seen_subcommand_from @COMMANDS@' -s o -x -a '(__fish_complete_list , __tensorfs_options)'
complete -c tensorfs -n '__fish_seen_subcommand_from @MOUNTS@' -x -a '(__tensorfs_mounts)'
complete -c tensorfs -n '__fish_seen_subcommand_from warm' -a '(__tensorfs_mounts)'
