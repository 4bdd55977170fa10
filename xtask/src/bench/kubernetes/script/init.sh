#!/bin/busybox sh
# Starts the programs of Kubernetes without a node around them, by a shell, as fast as possible.
#
# Packed as /init, with busybox, openssl, etcd, mkfs.xfs, ctr, and the programs' configuration in /etc. The machine has
# the kernel and the disk of the node that it is compared with. Wherever there is a choice, it favours this script, as
# long as the real programs schedule a pod and run it: fixed tokens instead of client certificates, one key for
# everything, no leader election, no dm-verity, a fixed address, a data partition in its original size. Nothing is
# supervised or restarted.
#
# Its lines on the console begin with "script: ". "script: running" ends the first measurement, and the second one is
# from "script: pulling" to "script: pulled"; "script: failed" means that a program ended, and has its last output.

export PATH=/ext/kubernetes/bin:/bin:/sbin
extension=/dev/vda2
data=/dev/vda3
logs=/run/log
own=/api/v1/namespaces/default

# Containers change their root by pivot_root, which does not accept the initramfs as the old root.
if [ "$1" != inside ]; then
    /bin/busybox mount -t proc proc /proc
    mount -t tmpfs tmpfs /new
    cp -a /bin /etc /init /lib* /sbin /new
    mkdir -p /new/data /new/dev /new/ext/kubernetes /new/proc /new/run /new/sys /new/tmp
    exec switch_root /new /init inside
fi

say() { echo "script: $*" >/dev/console; }

failed() { say "failed: $1: $(grep -E '^(F|panic|fatal)' $logs/$1 || tail -n 3 $logs/$1)"; }

# Starts a program that runs forever; its log has its name.
start() {
    name=$1
    shift
    { "$@" >$logs/$name 2>&1; failed $name; } &
}

mounts() {
    # The shell finds its own tools through /proc.
    /bin/busybox mount -t proc proc /proc
    mount -t devtmpfs dev /dev
    mkdir /dev/pts /dev/shm
    mount -t devpts devpts /dev/pts
    mount -t tmpfs tmpfs /dev/shm
    mount -t sysfs sysfs /sys
    mount -t cgroup2 cgroup /sys/fs/cgroup
    mount -t tmpfs tmpfs /run
    mkdir $logs /run/etcd
    mount --make-rshared /
    until [ -b $data ]; do usleep 5000; done
    mount -t erofs -o ro $extension /ext/kubernetes
}

network() {
    hostname script
    ip link set lo up
    ip link set eth0 up
    ip addr add 10.0.2.15/24 dev eth0
    ip route add default via 10.0.2.2
    echo 1 >/proc/sys/net/ipv4/ip_forward
}

storage() {
    mkfs.xfs -q -f $data >$logs/mkfs 2>&1 || failed mkfs
    mount -t xfs $data /data
    mkdir -m 700 /data/etcd
}

# Both are in one folder: the API server finds etcd's socket by a relative name.
store() {
    cd /run/etcd
    start etcd etcd --data-dir=/data/etcd \
        --listen-client-urls=unix://client:0 --advertise-client-urls=unix://client:0 \
        --listen-peer-urls=unix://peer:0 --initial-advertise-peer-urls=unix://peer:0 \
        --initial-cluster=default=unix://peer:0 \
        --heartbeat-interval=20 --election-timeout=100 --pre-vote --enable-grpc-gateway=false
}

apiserver() {
    cd /run/etcd
    start apiserver kube-apiserver --etcd-servers=unix://client:0 \
        --advertise-address=10.0.2.15 --bind-address=0.0.0.0 --secure-port=6443 \
        --service-cluster-ip-range=10.224.0.0/16 --endpoint-reconciler-type=lease \
        --tls-cert-file=/etc/certificate.pem --tls-private-key-file=/etc/key.pem \
        --token-auth-file=/etc/tokens.csv --anonymous-auth=false \
        --service-account-key-file=/etc/certificate.pem --service-account-signing-key-file=/etc/key.pem \
        --service-account-issuer=https://kubernetes.default.svc.cluster.local \
        --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction \
        --allow-privileged --profiling=false --cert-dir=/run/apiserver
}

# The controller-manager exits if the API server is not healthy within ten seconds. Each query is a TLS handshake, which
# is expensive for an emulated machine, so the log is used to decide when to ask.
serving() {
    until grep -q 'Serving securely' $logs/apiserver; do usleep 100000; done
    say serving
    until grep -q 'all system priority classes' $logs/apiserver; do usleep 100000; done
    until ask /readyz >/run/answer; do usleep 200000; done
    say ready
}

managers() {
    signing=certificatesigningrequest
    controllers="*,-bootstrap-signer-controller,-token-cleaner-controller,-$signing-signing-controller"
    controllers="$controllers,-$signing-approving-controller,-$signing-cleaner-controller,-ttl-controller"
    all="--bind-address=127.0.0.1 --authentication-skip-lookup --leader-elect=false --profiling=false
        --tls-cert-file=/etc/certificate.pem --tls-private-key-file=/etc/key.pem"
    start controller-manager kube-controller-manager $all --secure-port=10257 \
        --kubeconfig=/etc/controller-manager.kubeconfig \
        --service-account-private-key-file=/etc/key.pem --root-ca-file=/etc/certificate.pem \
        --use-service-account-credentials --allocate-node-cidrs=false \
        --controllers="$controllers"
    start scheduler kube-scheduler $all --secure-port=10259 --kubeconfig=/etc/scheduler.kubeconfig
}

containers() {
    start containerd containerd --config=/etc/containerd.toml
    until [ -S /run/containerd/containerd.sock ]; do usleep 50000; done
    for image in /ext/kubernetes/images/*.tar; do
        ctr --namespace=k8s.io images import $image >>$logs/import 2>&1 || failed import
    done
    say images
}

worker() {
    start kubelet kubelet --config=/etc/kubelet.yaml --kubeconfig=/etc/kubelet.kubeconfig \
        --hostname-override=script --node-ip=10.0.2.15 --root-dir=/data/kubelet --cert-dir=/run/kubelet \
        --runtime-cgroups=/
    start proxy kube-proxy --config=/etc/proxy.yaml
}

# Sends a request to the API server. busybox's wget runs openssl for it: its own TLS is too old for the server. The
# answer is in Kubernetes' binary encoding, which is cheaper for the server, and still has its words in plain text.
ask() {
    path=$1
    shift
    wget -q -O - --no-check-certificate --header='Authorization: Bearer admin' \
        --header='Accept: application/vnd.kubernetes.protobuf' "$@" "https://127.0.0.1:6443$path" 2>>$logs/ask
}

# Watches an object until a line of its changes contains a word. A new connection costs more than waiting on one. (The
# word must not come last: it is found when its line has ended, and a "line" of the binary encoding ends before the next
# field of an object.) The pipe is the object's own: the client of an earlier one may still write.
told() {
    changes=/run/$1-$2
    mkfifo $changes
    while true; do
        ask "$own/$1?watch=1&fieldSelector=metadata.name=$2" >$changes &
        grep -q "$3" $changes && break
        usleep 100000
    done
    kill $!
}

# Creates a pod as soon as the API server accepts it, and waits until it runs.
pod() {
    until ask $own/pods --header='Content-Type: application/json' --post-file=/etc/$1.json >/run/answer; do
        usleep 100000
    done
    say pod $1
    told pods $1 Running
}

mounts
say kernel
network
apiserver
storage
store
{ containers; worker; } &
serving
managers
# A pod is not admitted before the default service account exists.
told serviceaccounts default ServiceAccount
pod probe
say running
# So long is a node left alone, whose memory is measured.
sleep 10
say pulling
pod pulled
say pulled
# The first process must not end.
while true; do sleep 1000; done
