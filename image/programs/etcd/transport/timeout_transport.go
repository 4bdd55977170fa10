// Package transport: one file of etcd's, replaced when it is built.
//
// etcd gives up a connection between members on which nothing arrives for five seconds: streams
// carry heartbeats, so silence means that the other side, or the network between, is gone. Upstream
// wraps connections for this in http.Transport.Dial, but NewTransport sets DialContext, which takes
// precedence. So nothing is wrapped, and a member reads from a dead connection until TCP's
// keep-alive ends it, after 165 seconds. Here the wrapper is around DialContext.
package transport

import (
	"context"
	"net"
	"net/http"
	"time"
)

// NewTimeoutTransport returns a transport whose connections fail when a single read or write takes
// longer than its timeout. A timeout of zero means none.
func NewTimeoutTransport(info TLSInfo, dialTimeout, readTimeout, writeTimeout time.Duration) (*http.Transport, error) {
	transport, err := NewTransport(info, dialTimeout)
	if err != nil {
		return nil, err
	}
	transport.MaxIdleConnsPerHost = 1024
	if readTimeout != 0 || writeTimeout != 0 {
		// A connection that is idle runs into its timeout: it must not be used again.
		transport.MaxIdleConnsPerHost = -1
	}
	dial := transport.DialContext
	transport.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		return &timeoutConn{Conn: conn, readTimeout: readTimeout, writeTimeout: writeTimeout}, nil
	}
	return transport, nil
}
