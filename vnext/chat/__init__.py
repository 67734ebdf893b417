"""`vnext chat`: a talk in the terminal."""
