// All Kubernetes programs of a node in one file; the name that the file is called by selects the program.
//
// The programs share nearly all of their code, so one file is about as large as the largest of them. Each case does
// what the program's own main function does, for the pinned version: compare again after a version change.
package main

import (
	goflag "flag"
	"fmt"
	"math/rand"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	cliflag "k8s.io/component-base/cli/flag"
	"k8s.io/component-base/logs"
	// Client metrics of all programs, and the metric that reports the version.
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"

	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// What a program does before its command line is parsed, and its command.
type program struct {
	prepare func()
	command func() *cobra.Command
}

var programs = map[string]program{
	"kube-apiserver":          {func() {}, func() *cobra.Command { return apiserver.NewAPIServerCommand() }},
	"kube-controller-manager": {func() {}, func() *cobra.Command { return controllermanager.NewControllerManagerCommand() }},
	"kube-scheduler":          {dashes, func() *cobra.Command { return scheduler.NewSchedulerCommand() }},
	"kubelet":                 {func() {}, func() *cobra.Command { return kubelet.NewKubeletCommand() }},
	"kube-proxy":              {dashesAndGoFlags, func() *cobra.Command { return proxy.NewProxyCommand() }},
}

// Allows underscores in flags.
func dashes() {
	pflag.CommandLine.SetNormalizeFunc(cliflag.WordSepNormalizeFunc)
}

func dashesAndGoFlags() {
	dashes()
	pflag.CommandLine.AddGoFlagSet(goflag.CommandLine)
}

func main() {
	os.Exit(run(filepath.Base(os.Args[0])))
}

func run(name string) int {
	rand.Seed(time.Now().UnixNano())
	chosen, known := programs[name]
	if !known {
		fmt.Fprintf(os.Stderr, "unknown program %s\n", name)
		return 2
	}
	command := chosen.command()
	chosen.prepare()
	logs.InitLogs()
	defer logs.FlushLogs()
	if command.Execute() != nil {
		return 1
	}
	return 0
}
