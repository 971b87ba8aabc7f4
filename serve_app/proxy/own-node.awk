# Prefer replicas of this node if there are others too. These are a backend's servers on the loopback address, each chosen
# with equal probability up to a hundred connections. Otherwise, HAProxy chooses the server with the fewest connections.
$1 == "server" && / check/ && !/ backup/ {
    if ($3 ~ /^(127\.0\.0\.1|\[::1\]):/)
        own[NR] = ++left
    else
        others = 1
}
{ line[NR] = $0 }
END {
    for (n = 1; n <= NR; n++) {
        print line[n]
        if (others && n in own) {
            split(line[n], word)
            printf "    use-server %s if { srv_is_up(%s) } { srv_conn(%s) lt 100 } { rand(%d) lt 1 }\n",
                word[2], word[2], word[2], left--
        }
    }
}
