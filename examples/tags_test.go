//go:build !cuda

package examples_test

// tags are the build tags of this test, for the programs it builds.
var tags []string
