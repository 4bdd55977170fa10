// Every Kubernetes program of a node in one file. The name by which the file is called selects the program.
//
// The programs consist of nearly the same code, so one file is little larger than the largest of them. Each case does
// what upstream's own main function does (cmd/NAME in k8s.io/kubernetes): compare again after a change of the minor
// version.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	_ "time/tzdata" // time zones of CronJobs: a node has no zone files

	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"          // logs as JSON
	_ "k8s.io/component-base/metrics/prometheus/clientgo" // metrics of API clients
	_ "k8s.io/component-base/metrics/prometheus/version"  // the version as a metric
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// The commands are made on demand: making one registers its flags.
var programs = map[string]func() *cobra.Command{
	"kube-apiserver":          func() *cobra.Command { return apiserver.NewAPIServerCommand() },
	"kube-controller-manager": func() *cobra.Command { return controllermanager.NewControllerManagerCommand() },
	"kube-proxy":              func() *cobra.Command { return proxy.NewProxyCommand() },
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
}

func main() {
	name := filepath.Base(os.Args[0])
	command, known := programs[name]
	if !known {
		fmt.Fprintf(os.Stderr, "%s is not a Kubernetes program of this file\n", name)
		os.Exit(2)
	}
	os.Exit(cli.Run(command()))
}
