//go:build linux

package rendezvous

import (
	"bytes"
	"context"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestSecretFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "secret")
	require.NoError(t, os.WriteFile(path, []byte("0123456789abcdef\n"), 0o600))
	got, err := ReadSecret(path)
	require.NoError(t, err)
	require.Equal(t, "0123456789abcdef", string(got))
	require.NoError(t, os.Chmod(path, 0o640))
	_, err = ReadSecret(path)
	require.ErrorContains(t, err, "0640")
	require.NoError(t, os.Chmod(path, 0o600))
	require.NoError(t, os.WriteFile(path, []byte("short\n"), 0o600))
	_, err = ReadSecret(path)
	require.ErrorContains(t, err, "5 bytes; allowed: 16 to 4096")
	_, err = ReadSecret(t.TempDir())
	require.ErrorContains(t, err, "no regular file")
	_, err = Open(context.Background(), Config{World: 2, Address: "127.0.0.1:1"})
	require.ErrorIs(t, err, ErrSecret)
}

// What went over the wire is useless to who recorded it: replayed as a whole or in part it opens nothing, and neither the
// configuration nor a blob can be read in it.
func TestReplay(t *testing.T) {
	list := configs(t, 2, true)
	tap, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var recorded bytes.Buffer
	var wg sync.WaitGroup
	wg.Go(func() {
		conn, err := tap.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		server, err := net.Dial("tcp", list[0].Address)
		if err != nil {
			return
		}
		defer server.Close()
		wg.Go(func() { _, _ = io.Copy(conn, server); _ = conn.Close() })
		_, _ = io.Copy(server, io.TeeReader(conn, &recorded))
	})
	var groups []*Group
	ready := make(chan *Group)
	go func() {
		g, err := Open(context.Background(), list[0])
		assert.NoError(t, err)
		ready <- g
	}()
	time.Sleep(100 * time.Millisecond)
	through := list[1]
	through.Address = tap.Addr().String()
	g1, err := Open(context.Background(), through)
	require.NoError(t, err)
	groups = append(groups, <-ready, g1)
	together(groups, func(_ int, g *Group) {
		_, err := g.AllGather(context.Background(), []byte("unique id of a library"))
		assert.NoError(t, err)
	})
	together(groups, func(_ int, g *Group) { g.Close() })
	_ = tap.Close()
	wg.Wait()
	require.NotContains(t, recorded.String(), "unique id")
	require.NotContains(t, recorded.String(), "GGML_CUDA")

	list[0].Timeout = 500 * time.Millisecond
	go func() {
		_, err := Open(context.Background(), list[0])
		assert.ErrorContains(t, err, "rank 1 did not come")
		assert.ErrorContains(t, err, "secrets differ")
		ready <- nil
	}()
	var conn net.Conn
	require.Eventually(t, func() bool { conn, err = net.Dial("tcp", list[0].Address); return err == nil }, 5*time.Second, time.Millisecond)
	_, _ = conn.Write(recorded.Bytes())
	<-ready
	_ = conn.Close()
}

// A sealed message that is changed or sent twice is refused.
func TestSealed(t *testing.T) {
	for _, how := range []string{"good", "changed", "twice"} {
		a, b := net.Pipe()
		server, client := newTCPLink(a), newTCPLink(b)
		done := make(chan error, 1)
		go func() { done <- server.challenge(secret, time.Now().Add(time.Second)) }()
		require.NoError(t, client.prove(secret, time.Now().Add(time.Second)))
		require.NoError(t, <-done)
		header := putHeader(message{kind: kindGather}, 5+sealBytes)
		packet := client.out.Seal(header, nonceOf(0), []byte("hello"), header)
		if how == "changed" {
			packet[headerBytes] ^= 1
		}
		go func() {
			_, _ = b.Write(packet)
			if how == "twice" {
				_, _ = b.Write(packet)
			}
		}()
		server.deadline(time.Now().Add(time.Second))
		m, err := server.receive(100)
		if how == "twice" {
			require.NoError(t, err)
			m, err = server.receive(100)
		}
		if how == "good" {
			require.NoError(t, err)
			require.Equal(t, "hello", string(m.payload))
		} else {
			require.ErrorIs(t, err, errGarbage)
		}
		_ = a.Close()
		_ = b.Close()
	}
}
