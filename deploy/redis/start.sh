#!/bin/sh
# Start Redis, or as `start.sh sentinel` a Sentinel. The password comes from the environment and is not on the command
# line, where every process of the machine could read it.
#
#   REDIS_PASSWORD   letters and digits
#   ANNOUNCE         the name under which others reach this server; its host name if not set
#   REPLICA_OF       the primary at the very start, for servers with replicas; later the Sentinels know better
#   SENTINEL         where to ask them
set -eu
umask 077
announce="${ANNOUNCE:-$(hostname)}"

if [ "${1:-}" = sentinel ]; then
  # A Sentinel keeps what it learns in its file, so the file is written once.
  [ -f /data/sentinel.conf ] || cat > /data/sentinel.conf <<END
port 26379
dir /data
sentinel resolve-hostnames yes
sentinel announce-hostnames yes
sentinel announce-ip $announce
sentinel monitor headgate $REPLICA_OF 6379 2
sentinel auth-pass headgate $REDIS_PASSWORD
sentinel down-after-milliseconds headgate 5000
sentinel failover-timeout headgate 15000
END
  exec redis-sentinel /data/sentinel.conf
fi

cat > /tmp/own.conf <<END
requirepass $REDIS_PASSWORD
masterauth $REDIS_PASSWORD
END
if [ -n "${REPLICA_OF:-}" ]; then
  ask="timeout 5 env -u REDISCLI_AUTH redis-cli -h ${SENTINEL:-sentinel} -p 26379 --raw"
  primary="$($ask sentinel get-master-addr-by-name headgate 2> /dev/null | head -n 1)" || primary=""
  primary="${primary:-$REPLICA_OF}"
  echo "replica-announce-ip $announce" >> /tmp/own.conf
  [ "$primary" = "$announce" ] || echo "replicaof $primary 6379" >> /tmp/own.conf
fi
exec redis-server /etc/redis/redis.conf
