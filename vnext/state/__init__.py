"""What is true: events, the state they fold into, and the laws it obeys. Pure: no clock, device, file or chance."""
